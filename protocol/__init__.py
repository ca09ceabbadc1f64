"""The wire between coordinator and fleet: messages, codec, blobs, transports, liveness."""
