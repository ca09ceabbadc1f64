"""The fleet: who is a member, who is on-line, and who is asked."""
