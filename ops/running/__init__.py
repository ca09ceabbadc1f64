"""The processes of `fedemu run`, from the claim on a folder to the last line."""
