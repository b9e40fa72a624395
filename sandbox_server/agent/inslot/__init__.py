"""The tools: what turns a call's arguments into work in a slot."""
