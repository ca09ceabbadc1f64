"""What all commands share: their options, help texts and completion, and errors as sentences and exit codes."""
