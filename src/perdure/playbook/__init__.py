"""What can break, how it shows, what it means. Data and a pure matcher; it reads only what it is given."""
