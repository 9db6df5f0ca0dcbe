"""What people look at: the terminal while a run goes on, and the page it leaves behind."""
