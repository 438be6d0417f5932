"""Takes requests, chooses workers, drives the hand-off, streams the answer, replays what a lost worker had."""
