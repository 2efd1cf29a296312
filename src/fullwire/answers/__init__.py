"""What needs several rooms: a question as people put it, answered from what the rooms offer."""
