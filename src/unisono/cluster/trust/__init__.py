"""Who may speak with whom: tokens, certificates, invitations."""
