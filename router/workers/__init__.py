"""The workers as the router knows them: members, the line to each, holds, and the controller."""
