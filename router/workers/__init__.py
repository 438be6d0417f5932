"""The workers as the router knows them: who they are, the line to each, holds, and the controller."""
