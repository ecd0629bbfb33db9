"""Tools of MCP servers (Model Context Protocol): which servers there are, their tools, and calls with limits."""
