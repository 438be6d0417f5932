"""A node's arena and the books over it: the directory, its server and client, and the writer to the cold tier."""
