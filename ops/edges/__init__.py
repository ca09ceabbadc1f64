"""How machines reach their coordinator: by connections of their own, by shared ones, and through edges."""
