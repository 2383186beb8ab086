"""The back ends: how a layer is computed."""
