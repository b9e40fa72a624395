"""What several kinds of tests need: real services, ordinary users, the tables of the README."""
