"""The same brain on a made-up cluster in made-up time. It knows control and agents; it knows no real process or clock."""
