"""Support of the tests of swe_smith_oracle."""
