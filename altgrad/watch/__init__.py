"""Follow cells while they train, for people and for trackers, by reading the files that training writes."""
