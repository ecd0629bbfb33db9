"""Tools of MCP (Model Context Protocol) servers: configuration, connections, and calls with limits."""
