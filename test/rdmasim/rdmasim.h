/* SPDX-License-Identifier: GPL-2.0 */
/*
 * rdmasim: RDMA devices without RDMA hardware, for tests of whatever moves
 * RDMA devices between network namespaces.
 *
 * verbs.c    what ib_core and its clients need to see: stubs that succeed
 * parent.c   what a device hangs on: a PCI function, an auxiliary device, nothing
 * device.c   one simulated device: register, follow the netdev, drop
 * control.c  the command language of /dev/rdmasim
 *
 * Locks, outermost first:
 *   device_lock() of a PCI parent  held by the driver core in bus notifiers
 *   sim_lock                       the list of devices and their lifetime
 *   pernet_ops_rwsem, rtnl         taken by ib_core and by netdev registration
 * Callbacks from ib_core (enable_driver, client remove, verbs) run inside a
 * move and may never take sim_lock: its holder can be waiting for that move.
 */
#ifndef RDMASIM_H
#define RDMASIM_H

#include <linux/auxiliary_bus.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <rdma/ib_verbs.h>

#define SIM_MAX_PORTS	8
#define SIM_GID_TABLE	16
#define SIM_NAME_MAX	64

enum sim_parent { SIM_PARENT_NONE, SIM_PARENT_PCI, SIM_PARENT_AUX };

/* What the add command asked for. Kept while the device lives, and across an
 * unbind of its PCI function when rebind is set.
 */
struct sim_spec {
	char name[SIM_NAME_MAX];
	enum sim_parent parent;
	char parent_name[SIM_NAME_MAX];
	unsigned int ports;
	unsigned int pkey;
	bool ib_link;
	bool movable;
	bool anonymous;			/* no driver ID, beside rdma_rxe */
	bool zero_guid;
	bool netdev;
	bool rebind;
	bool tc;
};

struct sim_aux {
	struct auxiliary_device adev;
	struct net_device *ndev;
	char modname[SIM_NAME_MAX];
	char name[SIM_NAME_MAX];
};

struct sim_tc_port;

/* The registered part: embeds the ib_device, freed by ib_dealloc_device(). */
struct sim_ib {
	struct ib_device ibdev;		/* first: ib_alloc_device() requires it */
	struct notifier_block nb;
	struct net_device __rcu *ndev[SIM_MAX_PORTS];
	bool follows_netdev;
	bool ib_link;
	bool registered;
	bool active[SIM_MAX_PORTS];
	__be64 guid;
	u16 pkey;			/* the one entry of each port's table */
	enum ib_port_state ib_state;	/* of a port with an InfiniBand link */
	atomic_t next_qpn;
	atomic_t remove_delay_ms;	/* one-shot faults */
	atomic_t enable_errno;
	struct kobject *tc;			/* NULL without tc=1 */
	struct sim_tc_port *tc_port[SIM_MAX_PORTS];
};

struct sim {
	struct list_head entry;		/* in sims, under sim_lock */
	unsigned int id;
	struct sim_spec spec;
	struct device *parent;		/* NULL while unbound or for parent=none */
	struct sim_aux *aux;
	struct sim_ib *ib;		/* NULL while a rebind is awaited */
};

extern struct mutex sim_lock;
extern struct list_head sims;

static inline struct sim_ib *to_sim_ib(struct ib_device *ibdev)
{
	return container_of(ibdev, struct sim_ib, ibdev);
}

/* verbs.c */
void sim_set_ops(struct ib_device *ibdev, bool movable, bool anonymous);

/* device.c; all under sim_lock */
int sim_register(struct sim *sim);
void sim_unregister(struct sim *sim);
int sim_client_init(void);
void sim_client_exit(void);

/* tc.c; all under sim_lock */
int sim_tc_add(struct sim_ib *ib);
void sim_tc_remove(struct sim_ib *ib);

/* parent.c */
struct device *sim_pci_get(const char *address);
struct sim_aux *sim_aux_create(const char *name, bool netdev, unsigned int id);
void sim_aux_destroy(struct sim_aux *aux);
int sim_parent_init(void);
void sim_parent_exit(void);

/* control.c, called by the bus notifier */
void sim_parent_lost(struct device *parent);
void sim_parent_bound(struct device *parent);

#endif
