"""Who is still there: ranks that are late, lost or have failed, and waits that say so."""
