"""Concrete agents and their networks. Layer 3."""
