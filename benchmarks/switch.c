/* switch RATE_BITS_S DELAY_S TAP...: an Ethernet switch with a full-duplex link to each TAP device.

   benchmarks/namespaces.py compiles it and makes each TAP the eth0 of a host. A frame leaves the
   sender's link at RATE, passes the switch without waiting for its end (cut-through), waits for
   the receiver's link, and arrives DELAY later. Queues have no limit: nothing is lost. The TAPs
   take segmentation off the kernel (TSO), so a frame has up to 64 KB; it occupies the link as long
   as the packets of 1500 bytes that a network card would make of it. The last byte of a MAC address
   is the number of the TAP, from 1. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, BIGGEST = 1 << 17, GAP = 24 /* preamble, checksum, gap between packets */ };

struct frame { struct frame *next; double due; size_t size; char data[]; };
struct port { double sent_until, received_until; struct frame *first, **last; } ports[MOST];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int open_tap(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request)
        || ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) {
        perror(name);
        exit(1);
    }
    return fd;
}

/* The bytes that a frame occupies on a link, as packets with a header each. */
static double wire_bytes(const char *data, size_t size) {
    const struct virtio_net_hdr *about = (const void *)data;
    double length = size - sizeof *about, packets = 1, header = 0;
    if (about->gso_type != VIRTIO_NET_HDR_GSO_NONE) {
        const unsigned char *tcp = (const void *)(data + sizeof *about + about->csum_start);
        header = about->csum_start + (tcp[12] >> 4) * 4;
        packets = (int)((length - header + about->gso_size - 1) / about->gso_size);
    }
    return length + (packets - 1) * header + packets * GAP;
}

int main(int argc, char **argv) {
    int n = argc - 3;
    double rate = atof(argv[1]) / 8, delay = atof(argv[2]);
    struct pollfd taps[MOST];
    static char data[BIGGEST];
    for (int i = 0; i < n; i++) {
        taps[i] = (struct pollfd){open_tap(argv[i + 3]), POLLIN, 0};
        ports[i].last = &ports[i].first;
    }
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* Before the ranks, as hardware would. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){1});
    puts("ready");
    fflush(stdout);
    for (;;) {
        double next = now() + 1;
        for (int i = 0; i < n; i++)
            if (ports[i].first && ports[i].first->due < next) next = ports[i].first->due;
        double left = next - now();
        if (left < 0) left = 0;
        ppoll(taps, n, &(struct timespec){(time_t)left, (left - (time_t)left) * 1e9}, NULL);
        double time = now();
        for (int i = 0; i < n; i++) {
            if (taps[i].revents & POLLERR) return 1; /* the device is removed */
            ssize_t size;
            while ((size = read(taps[i].fd, data, sizeof data)) > 0) {
                double takes = wire_bytes(data, size) / rate;
                unsigned char *to = (unsigned char *)data + sizeof(struct virtio_net_hdr);
                double sent = ports[i].sent_until > time ? ports[i].sent_until : time;
                ports[i].sent_until = sent += takes;
                for (int j = 0; j < n; j++) {
                    if (j == i || !(to[0] & 1 || to[5] == j + 1)) continue;
                    double received = ports[j].received_until + takes;
                    ports[j].received_until = received = received > sent ? received : sent;
                    struct frame *frame = malloc(sizeof *frame + size);
                    *frame = (struct frame){NULL, received + delay, size};
                    memcpy(frame->data, data, size);
                    *ports[j].last = frame;
                    ports[j].last = &frame->next;
                }
            }
        }
        for (int j = 0; j < n; j++) {
            struct frame *frame;
            while ((frame = ports[j].first) && frame->due <= now()) {
                if (write(taps[j].fd, frame->data, frame->size) < 0) { /* the device is down */ }
                if (!(ports[j].first = frame->next)) ports[j].last = &ports[j].first;
                free(frame);
            }
        }
    }
}
