"""A node's arena: its directory, its server and client, and the writer to the cold tier."""
