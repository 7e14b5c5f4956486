"""From a scheduled request to its record: sockets, stamps, and how well the client itself did."""
