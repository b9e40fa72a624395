"""The agent's side of the template of slots: starts it, asks it to fork inits, replaces it when it has died, and reaps the inits."""
