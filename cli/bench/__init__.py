"""Open-loop load for a door: when which request is sent, the clients that send it, and figures of the answers."""
