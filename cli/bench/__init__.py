"""Open-loop load for a service: the schedule of requests, the clients that send them, and figures of the answers."""
