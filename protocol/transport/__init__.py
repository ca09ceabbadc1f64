"""What a transport is, and two of them: ZeroMQ, and a network in memory."""
