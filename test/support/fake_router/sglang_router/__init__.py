"""A stand-in for the package sglang-router with the parts of it that the launcher uses. It routes
nothing: it says that all servers are healthy, and ends by a signal."""
