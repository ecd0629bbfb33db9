"""A chat's back end three times: in this process, over HTTP, and scripted for tests and pictures."""
