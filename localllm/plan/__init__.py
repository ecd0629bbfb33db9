"""Model facts and machine facts -> what runs where, with every byte counted."""
