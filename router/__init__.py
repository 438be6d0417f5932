"""Takes requests, chooses workers for them, drives the hand-off, streams the answer, and replays what a lost worker had."""
