"""What processes say to each other (`messages`), how (`channel`), and the bytes that two sides share (`layouts`)."""
