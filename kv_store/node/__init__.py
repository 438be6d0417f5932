"""A node's arena: its directory, with server and client, and the claims on its slots."""
