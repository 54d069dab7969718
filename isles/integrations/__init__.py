"""isles in other people's trainers: `isles.integrations.transformers`, `isles.integrations.lightning`."""
