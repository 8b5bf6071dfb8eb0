"""What is checked about a spec once the store can be asked, before any worker starts."""
