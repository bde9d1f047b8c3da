#!/bin/bash
cat > /app/count.sh <<'SCRIPT'
#!/bin/bash
wc -w < "$1"
SCRIPT
chmod +x /app/count.sh
