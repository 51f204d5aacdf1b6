"""What came out: pictures and tables."""
