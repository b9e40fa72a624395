"""Tests of whole runs of the batch runner, with real slots and a scripted model server."""
