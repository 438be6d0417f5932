"""The router: takes requests, chooses workers, drives the hand-off, streams answers, replays lost attempts."""
