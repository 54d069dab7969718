"""What crosses the link."""
