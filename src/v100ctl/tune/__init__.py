"""Find the settings that are fastest on one's own card: trials of the same unit with other words, paired with what runs now."""
