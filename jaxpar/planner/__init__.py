"""What a plan costs before anything runs: seconds, bytes and what bounds them, of any plan on any device."""
