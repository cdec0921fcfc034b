// SPDX-License-Identifier: GPL-2.0
/* What a simulated device hangs on, and how it learns that this goes away. */
#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "rdmasim.h"

static struct device *sim_root;

/* A referenced device, or NULL if there is no such PCI function. */
struct device *sim_pci_get(const char *address)
{
	unsigned int domain, bus, slot, func;
	struct pci_dev *pdev;

	if (sscanf(address, "%x:%x:%x.%x", &domain, &bus, &slot, &func) != 4)
		return NULL;
	pdev = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, func));
	return pdev ? &pdev->dev : NULL;
}

static int sim_pci_event(struct notifier_block *nb, unsigned long event, void *data)
{
	switch (event) {
	case BUS_NOTIFY_UNBIND_DRIVER:
	case BUS_NOTIFY_DEL_DEVICE:
		sim_parent_lost(data);
		break;
	case BUS_NOTIFY_BOUND_DRIVER:
		sim_parent_bound(data);
		break;
	}
	return NOTIFY_DONE;
}

static struct notifier_block sim_pci_nb = { .notifier_call = sim_pci_event };

/* The netdev of a scalable function: swallows what it is given. */
static netdev_tx_t sim_netdev_xmit(struct sk_buff *skb, struct net_device *ndev)
{
	dev_kfree_skb(skb);
	return NETDEV_TX_OK;
}

static const struct net_device_ops sim_netdev_ops = {
	.ndo_start_xmit = sim_netdev_xmit,
	.ndo_set_mac_address = eth_mac_addr,
	.ndo_validate_addr = eth_validate_addr,
};

static void sim_netdev_drvinfo(struct net_device *ndev, struct ethtool_drvinfo *info)
{
	strscpy(info->driver, KBUILD_MODNAME, sizeof(info->driver));
	strscpy(info->bus_info, dev_name(ndev->dev.parent), sizeof(info->bus_info));
}

static const struct ethtool_ops sim_ethtool_ops = {
	.get_drvinfo = sim_netdev_drvinfo,
	.get_link = ethtool_op_get_link,
};

static int sim_netdev_create(struct sim_aux *aux, unsigned int id)
{
	u8 mac[ETH_ALEN] = { 0x02, 0x72, 0x73, id >> 16, id >> 8, id };
	struct net_device *ndev = alloc_etherdev(0);
	int err;

	if (!ndev)
		return -ENOMEM;
	SET_NETDEV_DEV(ndev, &aux->adev.dev);
	ndev->netdev_ops = &sim_netdev_ops;
	ndev->ethtool_ops = &sim_ethtool_ops;
	ndev->priv_flags |= IFF_NO_QUEUE;
	eth_hw_addr_set(ndev, mac);
	err = register_netdev(ndev);
	if (err) {
		free_netdev(ndev);
		return err;
	}
	aux->ndev = ndev;
	return 0;
}

static void sim_aux_release(struct device *dev)
{
	kfree(container_of(dev, struct sim_aux, adev.dev));
}

/* Splits MODULE.NAME.ID, the form of every auxiliary device's name. */
static int sim_aux_parse(struct sim_aux *aux, const char *full)
{
	const char *id = strrchr(full, '.');
	const char *name = strchr(full, '.');

	if (!id || name == id || name == full || id == name + 1)
		return -EINVAL;
	if (name - full >= sizeof(aux->modname) || id - name > sizeof(aux->name))
		return -ENAMETOOLONG;
	strscpy(aux->modname, full, name - full + 1);
	strscpy(aux->name, name + 1, id - name);
	return kstrtou32(id + 1, 10, &aux->adev.id);
}

struct sim_aux *sim_aux_create(const char *full, bool netdev, unsigned int id)
{
	struct sim_aux *aux = kzalloc(sizeof(*aux), GFP_KERNEL);
	int err;

	if (!aux)
		return ERR_PTR(-ENOMEM);
	err = sim_aux_parse(aux, full);
	if (err)
		goto free;
	aux->adev.name = aux->name;
	aux->adev.dev.parent = sim_root;
	aux->adev.dev.release = sim_aux_release;
	err = auxiliary_device_init(&aux->adev);
	if (err)
		goto free;
	err = __auxiliary_device_add(&aux->adev, aux->modname);
	if (err)
		goto uninit;
	if (netdev) {
		err = sim_netdev_create(aux, id);
		if (err)
			goto delete;
	}
	return aux;

delete:
	auxiliary_device_delete(&aux->adev);
uninit:
	auxiliary_device_uninit(&aux->adev);
	return ERR_PTR(err);
free:
	kfree(aux);
	return ERR_PTR(err);
}

void sim_aux_destroy(struct sim_aux *aux)
{
	if (aux->ndev) {
		unregister_netdev(aux->ndev);
		free_netdev(aux->ndev);
	}
	auxiliary_device_delete(&aux->adev);
	auxiliary_device_uninit(&aux->adev);
}

/* So that rdmasim.sf.N has a driver bound, as a real scalable function has. */
static int sim_sf_probe(struct auxiliary_device *adev, const struct auxiliary_device_id *id)
{
	return 0;
}

static const struct auxiliary_device_id sim_sf_ids[] = {
	{ .name = KBUILD_MODNAME ".sf" },
	{}
};

static struct auxiliary_driver sim_sf_driver = {
	.name = "sf",
	.probe = sim_sf_probe,
	.id_table = sim_sf_ids,
	/* The device is removed by command, never by an unbind of this driver. */
	.driver.suppress_bind_attrs = true,
};

int sim_parent_init(void)
{
	int err;

	sim_root = root_device_register(KBUILD_MODNAME);
	if (IS_ERR(sim_root))
		return PTR_ERR(sim_root);
	err = auxiliary_driver_register(&sim_sf_driver);
	if (err)
		goto root;
	err = bus_register_notifier(&pci_bus_type, &sim_pci_nb);
	if (err)
		goto driver;
	return 0;

driver:
	auxiliary_driver_unregister(&sim_sf_driver);
root:
	root_device_unregister(sim_root);
	return err;
}

void sim_parent_exit(void)
{
	bus_unregister_notifier(&pci_bus_type, &sim_pci_nb);
	auxiliary_driver_unregister(&sim_sf_driver);
	root_device_unregister(sim_root);
}
