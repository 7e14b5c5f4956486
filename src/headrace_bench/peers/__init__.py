"""The servers that Headrace is measured against: how each is installed, found and started. One file a peer."""
