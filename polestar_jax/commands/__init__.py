"""The subcommands of `polestar`, one module each, and what they share."""
