"""The router's and the sim engine's own code under a virtual clock: clusters you do not own, in seconds."""
