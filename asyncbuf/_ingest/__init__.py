"""From items to rows."""
