"""What is asked, and when: decided before a run starts, and stored with its result."""
