"""Which cached pages a pool evicts first."""
