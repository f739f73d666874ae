"""Reading of folders, archives and tables of data, once, into prepared folders."""
