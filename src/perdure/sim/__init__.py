"""The same brain on a made-up cluster in made-up time. Knows control and agents, but no real process and no clock."""
