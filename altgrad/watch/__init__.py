"""What cells do while they train, for people and for trackers: read off the files that training writes."""
