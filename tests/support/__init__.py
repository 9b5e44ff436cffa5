"""What several tests use. No test is here."""
